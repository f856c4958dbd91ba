"""What merging has to beat on any diffusion model: published rivals, those that look at no token,
and attention that tells nothing of space.
"""
