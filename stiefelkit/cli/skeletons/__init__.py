"""Plugins that `stiefelkit new-plugin` writes, a file a kind: each works as it stands, under the name skeleton."""
