"""The linear program: a bound for every plan, and a plan that comes close to it."""
