"""What a start-up would take on more nodes: a model by discrete events (extra ``sim``)."""
