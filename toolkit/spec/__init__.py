"""What a recipe says: read (`load`), validated (`validate`), resolved (`resolve`), shown (`show`)."""
