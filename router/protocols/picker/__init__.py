"""The endpoint picker: tells a gateway where each request goes, and hears what came of it."""
