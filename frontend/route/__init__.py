"""The front end of `lmi-server route`: the command, the file of keys, and the list of servers."""
