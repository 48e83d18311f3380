"""What several tests need and no test is."""
