"""What finetune_hf.py and generate.py share."""
