"""Who is my kin: what a client can tell about a peer, and how it chooses."""
