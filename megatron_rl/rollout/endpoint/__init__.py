"""An OpenAI-compatible endpoint in front of the engines: any program that speaks to it makes the run's rollouts."""
