"""An optimizer's step on pages."""
