"""Who may do what: tokens, sessions, joining, limits and the audit log."""
