"""What selection policies cost in quality: tasks over long prompts, answered by reading few keys."""
