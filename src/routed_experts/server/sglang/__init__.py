"""SGLang's dialect: POST /generate."""
