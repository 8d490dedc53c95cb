"""The wire: the generated classes of proto/kvdb/rpc/kvdb.proto, what turns values into them, and the table of statuses."""
