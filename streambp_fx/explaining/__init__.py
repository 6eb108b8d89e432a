"""What the backend makes of a program, found without running it."""
