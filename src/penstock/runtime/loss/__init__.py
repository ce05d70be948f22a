"""The user's loss: weighted by microbatch, with its own parameters, and watched for what it reads."""
