"""What operators look at, on a real proxy process under load while one of its nodes is killed."""
