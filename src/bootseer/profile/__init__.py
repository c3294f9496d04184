"""Start-up events, their analysis and its faces. Kept empty: ``bootseer.profile.emit`` is imported inside containers
that have nothing but a Python of 3.8 or later."""
