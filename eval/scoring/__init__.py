"""Score run folders and image folders."""
