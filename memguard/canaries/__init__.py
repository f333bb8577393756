"""What is planted: secret spaces, formats, the plan, where it goes in the data, and what was counted.

Imports torch nowhere at module level but in `injection`.
"""
