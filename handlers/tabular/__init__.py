"""Models of tables: scikit-learn and XGBoost."""
