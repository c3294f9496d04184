"""How a tree gets into a store: packs of compressed blocks first, the manifest last."""
