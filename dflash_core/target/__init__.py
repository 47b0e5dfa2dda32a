"""The frozen target model: its files, its features for training, its cache for decoding."""
