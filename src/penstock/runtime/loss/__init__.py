"""The user's loss: weighted by microbatch, run in order, watched for what it reads and keeps."""
