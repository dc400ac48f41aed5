"""All backends as this router knows them: what each is called, serves, has to do, and whether it is well."""
