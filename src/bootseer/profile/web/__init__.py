"""The pages of `bootseer profile serve`."""
