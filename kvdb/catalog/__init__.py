"""What is stored under which name, and which stored prefix a prompt begins with."""
