"""The user's loss: weighted by microbatch, run in order, and watched for what it reads and keeps."""
