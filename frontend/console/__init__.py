"""The console: pages for people, and the figures on them."""
