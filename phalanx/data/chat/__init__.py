"""From conversations to samples in which only the assistant's tokens are labels."""
