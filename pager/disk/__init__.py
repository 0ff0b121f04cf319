"""The disk tier: slots in one nameless file, the engines that move them, and their bench."""
