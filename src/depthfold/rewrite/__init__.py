"""(empty)"""
