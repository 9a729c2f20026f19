"""State beside keys and values: what recurrent layers keep of a sequence, however long it is."""
