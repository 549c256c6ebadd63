"""fp4ext in other libraries' training loops. Each module needs its library; none is imported by fp4ext itself."""
