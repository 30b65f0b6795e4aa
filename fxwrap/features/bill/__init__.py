"""The bill: the memory that recordings would keep, found out before there are any (``record(dry_run=True)``)."""
