"""What lies in a store: block maps, packs and tree manifests, and how a tree gets there."""
