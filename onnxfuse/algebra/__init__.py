"""Facts about operators, symbolic sizes and index maps; they depend on no graph and no kernel."""
