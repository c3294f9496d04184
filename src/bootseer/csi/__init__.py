"""The CSI driver of a node: images, environments and checkpoints as volumes of pods."""
