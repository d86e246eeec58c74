"""An OpenAI-compatible endpoint in front of the engines, through which any program can make the run's rollouts."""
