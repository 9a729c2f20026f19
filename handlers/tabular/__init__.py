"""Models of scikit-learn and XGBoost, which predict a value per row of a table.

The libraries are imported when a model loads.
"""
