"""SASL: how this process and the daemons of a secured cluster prove who they are, and what protects their bytes then:
`negotiation` at a NameNode, `transfer` at a DataNode; `gssapi` proves by a ticket, `digest` by a token."""
