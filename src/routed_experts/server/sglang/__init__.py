"""SGLang's route: POST /generate."""
