"""How the embedded models were trained: commands, and the modules that they share."""
