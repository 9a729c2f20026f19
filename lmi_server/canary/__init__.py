"""The command line of a new version that proves itself before it takes the place of the old one."""
