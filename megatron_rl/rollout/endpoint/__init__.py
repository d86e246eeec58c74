"""An OpenAI-compatible endpoint in front of the engines. Any program that uses it can make the run's rollouts."""
