"""Who may do what: API keys, pages of other sites, and clients that may manage."""
