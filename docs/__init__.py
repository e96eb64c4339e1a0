"""Pages for people, and the commands that write parts of them."""
