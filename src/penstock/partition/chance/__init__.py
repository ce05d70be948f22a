"""Forwards that branch at random: how their draws are recorded, and how a stage follows the outcomes."""
