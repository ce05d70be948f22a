"""How values travel between ranks: a protocol, three transports, and what both ends of a channel know."""
