"""What merging has to beat on any diffusion model: published rivals, those that look at no token,
and no attention at all.
"""
