"""Client HTTP in: routes, parsing, authentication, admission, error responses."""
