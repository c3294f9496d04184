"""What lies in a store: block maps, packs, tree manifests and hot packs, and how a tree gets there."""
