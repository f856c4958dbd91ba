"""The networks that metrics look through, as their authors defined them: inference only, weights given."""
