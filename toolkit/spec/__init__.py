"""What a recipe says: read (`load`), validated (`validate`), resolved (`recipe`), shown (`show`, `reference`)."""
