NAME = "top"
